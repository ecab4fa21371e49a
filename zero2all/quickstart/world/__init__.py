"""A small world in two languages and Python: facts, sums, stories and programs that a small model can learn.

Sixty-one facts per language are told over and over in many wordings, and every fact keeps two wordings that the
text never uses for it. Asking in those wordings shows whether the model learned the fact or only the sentence.

    facts       relations, held-out wordings, the sentences that may be printed
    language    the two languages, whose words are in en.json and zh.json; sums up to twenty, with some operand pairs
                kept out; a story grammar, and questions about the story just told
    generator   documents in the right proportions
    programs    small Python programs that run
    questions   what to ask a trained model: probes, contrast pairs, benchmark tasks

Everything follows from `seed`: the same documents, probes and pairs in every process and Python version.
"""

from zero2all.quickstart.world.generator import GeneratedText, documents
from zero2all.quickstart.world.language import LANGUAGES
from zero2all.quickstart.world.programs import programs
from zero2all.quickstart.world.questions import pairs, probes

__all__ = ["LANGUAGES", "GeneratedText", "documents", "pairs", "probes", "programs"]
