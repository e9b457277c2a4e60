"""Watches training: hangs, wrong numbers, slow ranks."""
