"""The tiers in which packed blobs are stored: RAM, disk, Redis; one protocol, one contract suite.

The store calls a tier from its own threads, and a tier may fail at any time:

1. ``registry.open_usable_tiers`` opens the tiers that are enabled, fastest first.
2. ``put_many`` and ``replace`` write; a blob that does not fit is refused, which is not an error.
3. ``get_many`` reads; an absent blob is ``None``. The store verifies the others by checksum.
4. ``touch`` and ``pin`` mark chains as in use. Local tiers choose what to evict
   (``return_order``); a Redis server evicts by its own policy.
5. ``delete_many`` removes forgotten blobs.

Data that leaves the process is sealed with the server's secret (``seal``), and only data with a
valid seal is trusted when it comes back.

Every error of the medium becomes ``kvstore.errors.TierUnavailable``, or ``TierInUse`` for a
folder that another process owns, and never costs more than a prefill.

A new tier is a module here, or a sub-package if it needs several. It implements ``Tier``; a local
one keeps a budget with ``ReturnOrder``. Add it to ``open_tiers`` in ``registry.py`` (and to
``open_usable_tiers`` if an engine may start without it), to ``KINDS`` of
``tests/contract/tier_rig.py``, so that ``test_tiers.py`` and ``test_tier_model.py`` run over it,
and to ``TierName`` and the table ``TIERS`` in ``kvstore.session``. These places also name each
tier:

- its budget and time to live: ``StoreConfig``; a tenant's limit: ``gateway.keys.Limits``, set by
  ``gateway.admin.routes``
- its default budget: ``launch.settings.budgets``; the shares of replicas: ``budgets`` in
  ``launch.settings.schema``; the shares of vLLM's ranks: ``rank_share`` in
  ``engines.vllm_plugin.worker.worker_side``
- command-line options: ``launch.cli.options``, ``main`` and ``running_server``; checks and messages
  at the start: ``launch.doctor`` and, in ``launch.serve``, ``preflight`` and ``run``; where
  ``thermocline calibrate`` turns it off: ``launch.calibrate.program``
- the tier in which sessions rest while their model is not loaded: ``launch.serve.build``; where
  they go when a replica ends: ``SHARED`` in ``engines.on_ray.front``
- the plan: ``launch.plan``, and the columns that print it: ``launch.cli``
- the word in ``x-thermocline-cache``: ``engines.http``; vLLM's word for the medium:
  ``engines.vllm_plugin.reports``
- the places of a session's KV: ``gateway.watch.shape``, and in ``gateway/dashboard/page``
  ``live/store.js``, ``parts/badges.js`` and ``strip.js``, ``views/turns.js``, ``memory.js``,
  ``sessions.js`` and ``session.js``; colours: ``style/base.css`` and ``parts.css``
- the reasons why KV was not stored, where the tier may be full or away: ``docs.generators``,
  ``headers_page``
"""
