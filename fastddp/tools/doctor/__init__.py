"""Looks at what a job will run on, before it runs (``fastddp doctor``, docs/doctor.md).

Data flows one way: facts (``software``, ``kernel_checks``, put together on each rank by ``examination``; ``exchange``)
→ findings (the judge of each kind of facts, all called by ``report``) → a page (``printing``) or JSON. Under torchrun,
``together`` collects the ranks' answers within a time limit.

No module here needs ``fastddp._C`` to be imported: a finding may be that this fails.
"""
