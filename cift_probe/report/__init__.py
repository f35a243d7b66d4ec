"""The clerk: the journal of a run, the report made of it, and what is derived from a report."""
