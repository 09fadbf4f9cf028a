"""A rollout in virtual time: the decisions are the live ones, everything else is a model.

Steps, memory and changes of the group are computed; who decodes where and who leaves is decided
by the same objects that the coordinator calls. Read ``rollout`` first.
"""
