"""Using a trained model: one engine for generation and scoring.

load        a run or a Hugging Face folder -> a model in memory
weights     its tensors by layer, as the engine reads them, or its matrices in 8 or 4 bits
cache       keys and values in blocks; blocks of equal content are shared
forward     passes over ragged batches, in plain torch
score       what a model says of the tokens of many texts: what they begin with is computed once
cuda        decoding passes on a GPU: our kernels, as CUDA graphs
sampling    how the next token is chosen
engine      continuous batching: requests come and go while others run
grammar     answers that follow a JSON schema or a grammar; llguidance in a process of its own
boundary    prompts that end in the middle of a token
text        prompts and tokens as text: streaming, stop strings
service     the engine in a thread of its own
chat        a conversation as a prompt: by a template, as its text asks, or as plain text
tools       thoughts and calls in an answer; the calculator that it may call
prompts     prompts from a file, each with its settings
spread      a model over several ranks: parts of passes, and engines that do the same
batch       many prompts as one batch, their results on disk, over kills
conversation, talk   a conversation as it grows, and the terminal it is held in
"""

from typing import Literal

CHAT_TEMPERATURE = 0.7
CHAT_NEW_TOKENS = 512
"""What `z2a chat` and the page of `z2a serve` begin with; all else is as in `sampling.Sampling`."""
WeightKind = Literal["plain", "int8", "int4"]
"""How the matrices of a model are kept: as they are, in 8 or in 4 bits (`weights`)."""
