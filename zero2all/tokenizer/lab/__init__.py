"""`z2a tokenizer eval`: what a vocabulary does to held-out text, side by side with others.

text        the text, by channel, and fixed texts for what corpora have little of
candidates  the tokenizers to compare
measure     all figures, as plain JSON
tables      the figures for the terminal
page        the figures as one HTML page
"""
