"""What the doctor says of one thing."""

import subprocess
from dataclasses import dataclass
from functools import partialmethod
from typing import Literal

Grade = Literal["ok", "note", "warning", "error"]
GRADES: tuple[Grade, ...] = ("ok", "note", "warning", "error")
COMMAND_SECONDS = 6.0


@dataclass(frozen=True)
class DoctorFinding:
    """One finding: what was found, why it matters and what to do. The last two are empty where all is well."""

    area: str
    grade: Grade
    found: str
    why: str = ""
    advice: str = ""


@dataclass(frozen=True)
class Area:
    """What findings are about: `Area("gpu").warning(found, why, advice)` is one."""

    name: str

    def graded(self, grade: Grade, found: str, why: str = "", advice: str = "") -> DoctorFinding:
        """A finding of this area."""
        return DoctorFinding(self.name, grade, found, why, advice)

    ok, note = partialmethod(graded, "ok"), partialmethod(graded, "note")
    warning, error = partialmethod(graded, "warning"), partialmethod(graded, "error")


def worst(findings: list[DoctorFinding]) -> Grade:
    """The gravest grade."""
    return max((each.grade for each in findings), key=GRADES.index, default="ok")


def output_of(command: list[str], seconds: float = COMMAND_SECONDS) -> tuple[str | None, str]:
    """Output of a command, or None, and why there is none."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=seconds, check=False)
    except FileNotFoundError:
        return None, f"{command[0]} is not installed"
    except OSError as error:
        return None, f"{command[0]}: {error.strerror}"
    except subprocess.TimeoutExpired:
        return None, f"{command[0]} did not answer within {seconds:g} s"
    if done.returncode:
        return None, " ".join((done.stdout + " " + done.stderr).split())[:300] or f"exit code {done.returncode}"
    return done.stdout, ""
