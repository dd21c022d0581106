"""Tests that vary the requests to one relay, which ends with the last of them: that takes a package."""
