"""Looks at what a job will run on, before it runs (``fastddp doctor``, docs/doctor.md).

Data flows one way: facts (:mod:`~fastddp.tools.doctor.software`, :mod:`~fastddp.tools.doctor.nvml`,
:mod:`~fastddp.tools.doctor.torch_gpus`, :mod:`~fastddp.tools.doctor.kernel_checks`, put together on each rank by
:mod:`~fastddp.tools.doctor.examination`; :mod:`~fastddp.tools.doctor.exchange`) → findings (the judge of each kind of
facts, all called by :mod:`~fastddp.tools.doctor.report`) → a page (:mod:`~fastddp.tools.doctor.printing`) or JSON.
Under torchrun, :mod:`~fastddp.tools.doctor.together` collects the ranks' answers within a time limit.

No module here needs ``fastddp._C`` to be imported: a finding may be that this fails.
"""
