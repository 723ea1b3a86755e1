#!/usr/bin/bash
mkdir today
