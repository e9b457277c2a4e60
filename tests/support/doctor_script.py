"""Runs `fastddp doctor` with little work and, on rank 1, something wrong: `doctor_script.py TROUBLE doctor ...`."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import replace
from typing import Any, NoReturn

import fastddp_command
from fastddp.tools.doctor import exchange, software


def hang(*arguments: Any) -> NoReturn:
    time.sleep(1000)
    raise AssertionError


def fail(*arguments: Any) -> NoReturn:
    raise RuntimeError("what a rank may raise")


def die(*arguments: Any) -> NoReturn:
    time.sleep(2)  # so that rank 0 is there
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def hang_in_allreduce_2(number: int, words: str) -> None:
    if words == "allreduce 2":
        hang()


def main() -> None:
    trouble = sys.argv.pop(1)
    exchange.MIB = 1
    measure: Any = exchange.measure
    if os.environ["RANK"] == "1":
        if trouble == "other versions":
            installed = replace(software.look(), torch="2.12.1", nccl="2.20.5")
            software.look = lambda: installed
        elif trouble == "wrong sums":
            exchange.measure = lambda *arguments: replace(measure(*arguments), is_right=False)
        elif trouble == "hang in allreduce 2":
            exchange.measure = lambda *arguments: measure(*arguments[:-1], hang_in_allreduce_2)
        elif trouble != "none":
            action, place = trouble.split(" in ")
            act = {"hang": hang, "fail": fail, "die": die}[action]
            if place == "examination":
                software.look = act
            elif place == "exchange":
                exchange.measure = act
            else:
                act()
    fastddp_command.main()


if __name__ == "__main__":
    main()
