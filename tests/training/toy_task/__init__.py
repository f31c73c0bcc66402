"""Tests of the shipped task."""
