"""A smaller vocabulary: embedding and head keep the tokens that are used, and the tokenizer is rebuilt."""
