"""What both ends of the wire agree on: generated messages, partition, framing, codecs, errors."""
