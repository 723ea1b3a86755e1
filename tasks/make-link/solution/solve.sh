#!/usr/bin/bash
ln -s {{pair.0}}.txt {{pair.1}}
