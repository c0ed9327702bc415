"""Decides who is hot and who sleeps; pure logic: no HTTP, no arrays, clock injected."""
