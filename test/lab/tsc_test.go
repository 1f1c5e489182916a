package lab

import (
	"runtime"
	"testing"
)

func TestTSCRateIsPlausible(t *testing.T) {
	low, high := 500_000, 10_000_000
	if runtime.GOARCH != "amd64" {
		low, high = 0, 0
	}
	if khz := tscKHz(); khz < low || khz > high {
		t.Errorf("got a time stamp counter of %d kHz, want %d to %d", khz, low, high)
	}
}
