"""What belongs to the whole process: shutdown, torch's threads, progress and warnings."""
