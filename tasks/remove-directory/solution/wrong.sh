#!/usr/bin/bash
rm -rf ./*
