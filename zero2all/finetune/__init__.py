"""Fine-tuning: conversations that teach a base model to answer.

dialogues    rows of others, in any of the usual forms -> conversations, or the reason why not
data         files -> packed conversations with their loss mask; what was left out, by reason
sft          a run of its own, from the weights of a base run, on these conversations
distill      the same beside what a larger model says of each token
"""
