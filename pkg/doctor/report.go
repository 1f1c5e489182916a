package doctor

import (
	"time"

	"github.com/nfsrdmad/nfsrdmad/pkg/control"
)

// A Result is the result of one step.
type Result string

// Results.
const (
	OK      Result = "ok"
	Warning Result = "warning" // a mount works, but not as well as it could
	Failed  Result = "failed"  // a mount fails
	Skipped Result = "skipped" // not tried; Text says why
)

// Groups of steps.
const (
	GroupHost   = "host"   // what this host needs for any mount
	GroupServer = "server" // the steps of a mount of Report.Source, in their order
)

// A Step is the outcome of one step. The names of its JSON fields, and the values of Group and
// Name, do not change between versions.
type Step struct {
	Group  string `json:"group"`
	Name   string `json:"name"`
	Result Result `json:"result"`
	// Needed means that a mount fails unless the step succeeds.
	Needed  bool    `json:"needed"`
	Seconds float64 `json:"seconds"`
	Text    string  `json:"text"`             // what was found
	Remedy  string  `json:"remedy,omitempty"` // what to do, as an imperative
}

// Outcomes of a Report.
const (
	OutcomeOK          = "ok"
	OutcomeFailed      = "failed"      // a step failed
	OutcomeInterrupted = "interrupted" // the caller canceled the diagnosis
)

// A Report is the result of a diagnosis.
type Report struct {
	Version control.VersionInfo `json:"version"`
	Time    time.Time           `json:"time"` // when the diagnosis began
	Seconds float64             `json:"seconds"`
	Source  string              `json:"source,omitempty"`  // HOST:/EXPORT; "" for the host only
	Options string              `json:"options,omitempty"` // all mount options
	Outcome string              `json:"outcome"`
	Steps   []Step              `json:"steps"`
	Keys    *KeyReport          `json:"keys,omitempty"` // nil without a connection
}

// FirstFailure returns the first step that failed, or nil.
func (r *Report) FirstFailure() *Step {
	for i := range r.Steps {
		if r.Steps[i].Result == Failed {
			return &r.Steps[i]
		}
	}
	return nil
}
