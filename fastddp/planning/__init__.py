"""Bucket plans: the default, the given, the delayed, and from measurements (``bucket_cap_mb="auto"``)."""
