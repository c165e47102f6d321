"""Executes a rewritten graph: ops, native engine, store, arena, optimizer. Decides nothing."""
