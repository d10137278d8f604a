"""PBSBench: extraction, metrics, blind rows, statistics, tables and the adapters that ask models."""
