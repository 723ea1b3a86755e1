#!/usr/bin/bash
rm -r old
