package softiwarp

import (
	"fmt"
	"os"
	"sync"

	"github.com/nfsrdmad/nfsrdmad/internal/leakcheck"
	"github.com/nfsrdmad/nfsrdmad/pkg/verbs"
)

// Name is the provider's and its device's name.
const Name = "softiwarp"

// A provider is the one soft RNIC of a configuration.
type provider struct {
	dev *device
}

// New makes a provider with one device. Every provider has its own STag space.
func New(cfg Config) verbs.Provider {
	return &provider{dev: &device{cfg: cfg.withDefaults(), table: stagTable{mrs: make(map[uint32]*mr)}}}
}

// Name returns "softiwarp".
func (p *provider) Name() string { return Name }

// A device is a soft RNIC. It keeps nothing open by itself.
type device struct {
	cfg   Config
	table stagTable
}

// Attrs tells the limits and abilities.
func (d *device) Attrs() verbs.DeviceAttrs {
	return verbs.DeviceAttrs{
		Name:                  Name,
		Transport:             verbs.TransportIWARP,
		Caps:                  verbs.CapFastReg | verbs.CapGaps | verbs.CapChosenIOVA | verbs.CapRegisterAny | verbs.CapRemoteInv | verbs.CapTerminates | verbs.CapLiveStats,
		PageSize:              os.Getpagesize(),
		MaxFastRegPageListLen: maxFRPages,
		MaxQPWR:               maxQPWR,
		MaxSendSGE:            maxSendSGE,
		MaxRecvSGE:            1,
		MaxSGERd:              1,
		MaxQPRdAtom:           maxReadDepth,
		MaxQPInitRdAtom:       maxReadDepth,
		MaxCQE:                maxCQE,
		MaxMR:                 maxMR,
	}
}

// AllocPD makes a protection domain.
func (d *device) AllocPD() (verbs.PD, error) {
	leakcheck.Track(leakcheck.PD, 1)
	return &protectionDomain{dev: d, uses: verbs.Uses{Provider: "softiwarp"}}, nil
}

// CreateCQ makes a completion queue and starts its dispatcher.
func (d *device) CreateCQ(depth int) (verbs.CQ, error) {
	if depth <= 0 || depth > maxCQE {
		return nil, fmt.Errorf("softiwarp: create completion queue of depth %d: the depth must be 1 to %d: %w", depth,
			maxCQE, verbs.ErrInvalid)
	}
	return newCQ(d, depth), nil
}

// A protectionDomain owns MRs and QPs.
type protectionDomain struct {
	dev  *device
	uses verbs.Uses
}

// AllocMR makes an MR for up to depth segments with up to depth pages of memory in all.
func (p *protectionDomain) AllocMR(depth int) (verbs.MR, error) {
	if depth <= 0 || depth > maxFRPages {
		return nil, fmt.Errorf("softiwarp: allocate MR of depth %d: the depth must be 1 to %d pages: %w", depth,
			maxFRPages, verbs.ErrInvalid)
	}
	if err := p.uses.Take(); err != nil {
		return nil, err
	}
	m := &mr{pd: p, depth: depth, starts: make([]uint64, 0, depth)}
	if err := p.dev.table.insert(m); err != nil {
		p.uses.Drop()
		return nil, err
	}
	leakcheck.Track(leakcheck.MR, 1)
	return m, nil
}

// RegMR is accepted for any memory: local buffers need no key here.
func (p *protectionDomain) RegMR([]byte) (verbs.MR, error) {
	if err := p.uses.Take(); err != nil {
		return nil, err
	}
	leakcheck.Track(leakcheck.MR, 1)
	return &localMR{pd: p}, nil
}

// Dealloc releases the PD.
func (p *protectionDomain) Dealloc() error {
	if err := p.uses.End(); err != nil {
		return err
	}
	leakcheck.Track(leakcheck.PD, -1)
	return nil
}

// A localMR stands for memory registered for local use. It has no keys and is in no table.
type localMR struct {
	pd   *protectionDomain
	once sync.Once
}

func (m *localMR) LKey() uint32     { return 0 }
func (m *localMR) RKey() verbs.RKey { return 0 }

func (m *localMR) Dereg() error {
	m.once.Do(func() {
		m.pd.uses.Drop()
		leakcheck.Track(leakcheck.MR, -1)
	})
	return nil
}
