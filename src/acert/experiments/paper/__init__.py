"""The paper's tables and figures: rows as data, the runs that fill them, ours beside theirs."""
