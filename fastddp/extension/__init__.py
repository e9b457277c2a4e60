"""The C++ part of fastddp, ``fastddp._C`` and ``fastddp._pages``: a folder for each torch that it is compiled for."""
