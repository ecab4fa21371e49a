"""`z2a tokenizer eval`: what a vocabulary does to held-out text, side by side with others.

candidates         the tokenizers to compare, and the text: by channel, and fixed texts for what corpora have little of
measure            all figures, as plain JSON, and as tables for the terminal
"""
