"""Looks at what a job will run on, before it runs (``fastddp doctor``, docs/doctor.md).

Facts (``software``, ``kernel_checks``, put together on each rank by ``examination``; ``exchange``) → findings → a page
or JSON (``report``). Under torchrun, ``together`` collects the ranks' answers within a time limit. Only
``kernel_checks`` needs ``fastddp._C`` to be imported: a finding may be that this fails.
"""
