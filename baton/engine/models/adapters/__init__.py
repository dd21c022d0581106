"""Adapters: small products of low rank that are added to those of a base model, for the tokens of requests that ask for
it."""
