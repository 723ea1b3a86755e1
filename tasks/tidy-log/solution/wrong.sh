#!/usr/bin/bash
mv debug.log logs
