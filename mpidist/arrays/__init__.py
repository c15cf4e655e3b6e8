"""Arrays of NumPy, CuPy and other libraries: conversion without a copy, dtypes, devices."""
