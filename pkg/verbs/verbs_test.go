package verbs_test

import (
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

func TestRKeyKeepsIndex(t *testing.T) {
	const k = verbs.RKey(0xabcdef12)
	if got := k.Key(); got != 0x12 {
		t.Errorf("key of %#x: got %#x, want 0x12", k, got)
	}
	if got := k.WithKey(0xff); got != 0xabcdefff {
		t.Errorf("%#x with key 0xff: got %#x, want 0xabcdefff", k, got)
	}
	if got := k.WithKey(0xff).WithKey(0); got != 0xabcdef00 {
		t.Errorf("%#x with key 0: got %#x, want 0xabcdef00", k, got)
	}
}

func TestCapsHas(t *testing.T) {
	c := verbs.CapFastReg | verbs.CapGaps
	for want, ok := range map[verbs.Caps]bool{0: true, verbs.CapGaps: true, verbs.CapGaps | verbs.CapRemoteInv: false} {
		if c.Has(want) != ok {
			t.Errorf("%b has %b: got %v, want %v", c, want, !ok, ok)
		}
	}
}

// TestStringsHaveNames checks that every value has a name, and that String accepts unknown values.
func TestStringsHaveNames(t *testing.T) {
	for s := verbs.StatusSuccess; s <= verbs.StatusRNRRetryExcErr; s++ {
		if s.String() == "" || s.String() == "unknown status" {
			t.Errorf("name of status %d: got %q", s, s)
		}
	}
	for o := verbs.OpSend; o <= verbs.OpRecv; o++ {
		if o.String() == "" || o.String() == "?" {
			t.Errorf("name of opcode %d: got %q", o, o)
		}
	}
	for k := verbs.ConnUnreachable; k <= verbs.ConnLocal; k++ {
		if k.String() == "" || k.String() == "unknown" {
			t.Errorf("name of error kind %d: got %q", k, k)
		}
	}
	for _, s := range []string{verbs.Status(200).String(), verbs.Opcode(200).String(),
		verbs.ConnErrorKind(200).String(), verbs.Transport(200).String()} {
		if s == "" {
			t.Error("name of an unknown value: got an empty string")
		}
	}
}

func TestConnErrorNamesPhaseAndCause(t *testing.T) {
	err := &verbs.ConnError{Kind: verbs.ConnTimeout, Phase: "read MPA reply", Addr: "192.0.2.1:20049",
		Err: io.ErrUnexpectedEOF}
	for _, want := range []string{"192.0.2.1:20049", "read MPA reply", "timed out", io.ErrUnexpectedEOF.Error()} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("error text: got %q, want it to contain %q", err, want)
		}
	}
	if !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("errors.Is(%v, %v): got false, want true", err, io.ErrUnexpectedEOF)
	}
}

func TestTerminateErrorNamesSide(t *testing.T) {
	for local, want := range map[bool]string{
		true:  "stream terminated by this side: too long (layer 1, type 2, code 0x05)",
		false: "stream terminated by peer: too long (layer 1, type 2, code 0x05)",
	} {
		err := &verbs.TerminateError{Local: local, Layer: 1, EType: 2, Code: 5, Text: "too long"}
		if got := err.Error(); got != want {
			t.Errorf("Local %v: got %q, want %q", local, got, want)
		}
	}
}
