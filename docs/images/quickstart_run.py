"""Puts one run of the quickstart into README.md and README.zh.md, and keeps it as quickstart-run.json.

    z2a quickstart --work quickstart | tee quickstart.log
    python docs/images/quickstart_run.py quickstart.log --work quickstart
    python docs/pictures.py --work quickstart result

The picture `result` has the figures of its run in its metadata; tests/test_pictures.py compares all four.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from draw_results import LANGUAGES, figures
from example import Example

from zero2all.common.language import in_chinese, padded
from zero2all.quickstart.pipeline import NAME_COLUMNS, SAMPLE_PROMPTS

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).parent / "quickstart-run.json"
LEFT_OUT = ("export ", "picture ")
"""Stages that the READMEs leave out."""
HOME = "/home/me/zero2all"
STAGE = re.compile(rf"(?P<name>.{{{NAME_COLUMNS}}}) (?P<time>[ \dhms]{{6}})  (?P<result>\S.*)")


def main() -> None:
    """Read the command line, write the record and both READMEs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path, help="what `z2a quickstart` printed, in English")
    parser.add_argument("--work", type=Path, default=Path("quickstart"), help="its workspace (default: ./quickstart)")
    options = parser.parse_args()
    example = Example(options.work)
    printed = printed_lines(options.log.read_text(encoding="utf-8").splitlines())
    record = {"figures": figures(example), "printed": printed, "printed_zh": chinese_lines(printed, example)}
    RECORD.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for name, key in (("README.md", "printed"), ("README.zh.md", "printed_zh")):
        path = ROOT / name
        path.write_text(with_block(path.read_text(encoding="utf-8"), record[key]), encoding="utf-8")


def printed_lines(log: list[str]) -> list[str]:
    """The stages and the result, with a home for the paths and without the progress of training."""
    first = next(number for number, line in enumerate(log) if line.startswith("raw data"))
    done = next(number for number, line in enumerate(log) if line.startswith("Done in"))
    stages = [line for line in log[first:done] if STAGE.fullmatch(line) and not line.startswith(LEFT_OUT)]
    (work,) = (line.removeprefix("In ").partition(":")[0] for line in log if line.startswith("In /"))
    lines = [*stages, "…", *log[done:]]
    lines = [re.sub(r"(?<=^  )\S+(?= (chat|generate|board|train))", f"{HOME}/.venv/bin/z2a", line) for line in lines]
    return [line.replace(work, f"{HOME}/quickstart") for line in lines]


def chinese_lines(printed: list[str], example: Example) -> list[str]:
    """The same run as it is printed in Chinese, with the Chinese sample."""
    prompt = SAMPLE_PROMPTS["zh"][0]
    summary = (example.workspace.root / "summary.md").read_text(encoding="utf-8")
    sample = summary.partition(f"zh, `{prompt}`:\n\n```\n")[2].partition("\n```")[0]
    lines = []
    for line in printed:
        if stage := STAGE.fullmatch(line):
            name, result = in_chinese(stage["name"].rstrip()), in_chinese(stage["result"])
            line = f"{padded(name, NAME_COLUMNS)} {stage['time']}  {result}"
        elif line.startswith("Sample: "):
            line = f"{in_chinese('Sample:')} {' '.join(sample.split())}"
        elif not line.startswith("  "):  # commands stay
            line = in_chinese(line)
        lines.append(line.replace(f"'{SAMPLE_PROMPTS['en'][0]}'", prompt))
    return lines


def with_block(text: str, lines: list[str]) -> str:
    """A README with these lines in the block that shows what the quickstart prints."""
    block = next(each for each in re.findall(r"```\n.*?```", text, re.DOTALL) if f"{HOME}/quickstart" in each)
    return text.replace(block, "\n".join(["```", *lines, "```"]))


if __name__ == "__main__":
    assert set(LANGUAGES) <= set(SAMPLE_PROMPTS), "the picture and the summary speak the same languages"
    main()
