package verbs_test

import (
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

func TestRKey(t *testing.T) {
	const k = verbs.RKey(0xabcdef12)
	if k.Key() != 0x12 || k.WithKey(0xff) != 0xabcdefff || k.WithKey(0xff).WithKey(0) != 0xabcdef00 {
		t.Errorf("the key of %#x is %#x, with others %#x", k, k.Key(), k.WithKey(0xff))
	}
}

func TestCaps(t *testing.T) {
	c := verbs.CapFastReg | verbs.CapGaps
	if !c.Has(0) || !c.Has(verbs.CapGaps) || c.Has(verbs.CapGaps|verbs.CapRemoteInv) {
		t.Error("Has is wrong")
	}
}

// TestNames: every value that a consumer may print has a name, and one out of range does not panic.
func TestNames(t *testing.T) {
	for s := verbs.StatusSuccess; s <= verbs.StatusGeneralErr; s++ {
		if s.String() == "" || s.String() == "unknown status" {
			t.Errorf("status %d has no name", s)
		}
	}
	for o := verbs.OpSend; o <= verbs.OpRecv; o++ {
		if o.String() == "" || o.String() == "?" {
			t.Errorf("opcode %d has no name", o)
		}
	}
	for k := verbs.ConnUnreachable; k <= verbs.ConnLocal; k++ {
		if k.String() == "" || k.String() == "unknown" {
			t.Errorf("kind %d has no name", k)
		}
	}
	for _, s := range []string{verbs.Status(200).String(), verbs.Opcode(200).String(),
		verbs.ConnErrorKind(200).String(), verbs.Transport(200).String()} {
		if s == "" {
			t.Error("a value out of range has no text at all")
		}
	}
}

func TestErrorTexts(t *testing.T) {
	ce := &verbs.ConnError{Kind: verbs.ConnTimeout, Phase: "read MPA reply", Addr: "192.0.2.1:20049",
		Err: io.ErrUnexpectedEOF}
	for _, want := range []string{"192.0.2.1:20049", "read MPA reply", "timed out", io.ErrUnexpectedEOF.Error()} {
		if !strings.Contains(ce.Error(), want) {
			t.Errorf("%q does not say %q", ce, want)
		}
	}
	if !errors.Is(ce, io.ErrUnexpectedEOF) {
		t.Error("the cause cannot be found")
	}
	for _, local := range []bool{true, false} {
		te := &verbs.TerminateError{Local: local, Layer: 1, EType: 2, Code: 5, Text: "too long"}
		if s := te.Error(); !strings.Contains(s, "too long") || strings.Contains(s, "this side") != local ||
			!strings.Contains(s, "0x05") {
			t.Errorf("Terminate, local %v: %q", local, s)
		}
	}
}
