"""The five services; each has the same shape and none imports another.

router     which group and sibling runs next, and where
inference  one vLLM replica: what version it serves, its KV budget
sandbox    boxes on one host: start, steps, verification
readybank  complete groups, leases, fates
trainer    the reference GRPO trainer and publisher of weights
"""
