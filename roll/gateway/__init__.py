"""The gateway for agents: an OpenAI endpoint whose conversations become trajectories, token for token.

Pure but for `server.py`, which serves HTTP; no Ray and no engine.
"""
