"""`z2a tokenizer eval`: what a vocabulary does to held-out text, side by side with others.

text = held_out_text(work / "corpus", "valid", limit_bytes=20_000_000)
report = evaluate(open_subjects(work / "tokenizer", ["tiktoken:o200k_base"], text), text)
evaluation_tables(report), evaluation_page(report)

text        the text, by channel, and fixed texts for what corpora have little of
subjects    the tokenizers to compare, from wherever they come
measure     all figures, as plain JSON
junk        which pieces are not worth their id
tables      the figures for the terminal
page        the figures as one HTML page
charts      its drawings
segments    its coloured segmentations
"""

from zero2all.tokenizer.lab.measure import evaluate
from zero2all.tokenizer.lab.page import evaluation_page
from zero2all.tokenizer.lab.subjects import Subject, open_subjects
from zero2all.tokenizer.lab.tables import evaluation_tables
from zero2all.tokenizer.lab.text import EvalText, held_out_text

__all__ = [
    "EvalText",
    "Subject",
    "evaluate",
    "evaluation_page",
    "evaluation_tables",
    "held_out_text",
    "open_subjects",
]
