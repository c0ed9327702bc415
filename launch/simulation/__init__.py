"""Simulates a fleet: real choice of replicas, real ledgers and eviction, a clock of its own."""
