"""What lies in a remote, and what it means (FORMAT 13): documents, their places, and the log of commits."""
