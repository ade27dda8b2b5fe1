"""The user's side: seals requests, opens responses."""
