"""Embeddings of the served model: its hidden states, pooled.

``hidden_states`` runs the model without its head, on the owner thread; ``embedder`` brings texts
there, one step at a time between the rounds of the batches; ``vectors`` writes the answer.
"""
