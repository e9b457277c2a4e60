"""What pip calls to build fastddp: setuptools, or a line about a setuptools that is missing or too old."""

OLDEST = 77  # as pyproject.toml has it, which pip reads only where it makes an environment itself

try:
    import setuptools

    found = int(setuptools.__version__.split(".")[0])
except ImportError:
    found = 0
if found < OLDEST:
    has = f"is {setuptools.__version__}" if found else "is missing"
    raise SystemExit(
        f"fastddp is built by setuptools, which {has} in this environment. Run: pip install 'setuptools>={OLDEST}'. Or "
        "leave out --no-build-isolation."
    )

from setuptools.build_meta import *  # noqa: E402, F403
