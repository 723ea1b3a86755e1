#!/usr/bin/bash
mv {{pair.0}}.txt {{pair.1}}/
