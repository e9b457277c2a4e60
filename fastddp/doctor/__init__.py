"""What a job will run on, looked at before it runs (``fastddp doctor``, docs/doctor.md).

Data flows one way: facts (:mod:`~fastddp.doctor.software`, :mod:`~fastddp.doctor.nvml`,
:mod:`~fastddp.doctor.torch_gpus`, :mod:`~fastddp.doctor.kernel_checks`, put together on each rank by
:mod:`~fastddp.doctor.examination`; :mod:`~fastddp.doctor.exchange`) → findings (the judge of each kind of facts, all
called by :mod:`~fastddp.doctor.report`) → a page (:mod:`~fastddp.doctor.printing`) or JSON. Under torchrun,
:mod:`~fastddp.doctor.watch` hears the ranks within a time limit.

No module here needs ``fastddp._C`` to be imported, since that it does not import may be what is found.
"""
