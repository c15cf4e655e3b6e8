"""Arrays of every kind on their way in and out: conversion without a copy, dtypes that can be reduced."""
