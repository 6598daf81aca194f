"""What a publisher keeps and sends: its baseline, the version that goes out, anchors, the commit."""
