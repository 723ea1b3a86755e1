"""Between the bank's domain and the outer world: stream messages, payloads, records."""
