"""Run configurations: `pbs train --config=NAME[:key=value,...]` names a file of this package or a path."""
