"""What belongs to the whole process: shutdown, signals, forks, torch's threads, ranks, files and records, progress and warnings."""
