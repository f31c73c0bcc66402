"""What docs/reliability.md promises, tried at scale: `python -m tests.campaign inputs|kills|disks`."""
