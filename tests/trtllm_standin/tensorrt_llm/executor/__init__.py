"""Requests, results and errors."""
