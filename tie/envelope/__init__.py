"""The sealed request and response (HPKE, AES-GCM)."""
