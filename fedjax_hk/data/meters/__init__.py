"""Readings of meters: files of many formats become one table on a regular grid."""
